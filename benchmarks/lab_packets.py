"""Let this network namespace's ``cable0`` carry packets of up to BYTES: ``lab_packets.py BYTES``.

Linux calls it big TCP (6.3 and newer; older kernels keep 64 KB).  ``ip`` before 6.3 cannot say it, so this speaks
netlink: one RTM_NEWLINK message with IFLA_GSO_IPV4_MAX_SIZE and IFLA_GRO_IPV4_MAX_SIZE (``linux/if_link.h``).
"""

import os
import socket
import struct
import sys

RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK = 16, 1, 4
GSO_IPV4_MAX_SIZE, GRO_IPV4_MAX_SIZE = 63, 64


def allow(device: str, size: int) -> None:
    """Raises OSError if the kernel refuses."""
    link = struct.pack("BBHiII", socket.AF_UNSPEC, 0, 0, socket.if_nametoindex(device), 0, 0)
    sizes = [struct.pack("HHI", 8, kind, size) for kind in (GSO_IPV4_MAX_SIZE, GRO_IPV4_MAX_SIZE)]
    body = b"".join([link, *sizes])
    header = struct.pack("IHHII", 16 + len(body), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + body)
        (error,) = struct.unpack_from("i", kernel.recv(4096), 16)
    if error:
        raise OSError(-error, f"{device}: packets of {size} bytes: {os.strerror(-error)}")


if __name__ == "__main__":
    allow("cable0", int(sys.argv[1]))

"""What runs on both hosts of the lab (``test_two_hosts.py``): a training step with the experts divided between them."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def run(fail: bool) -> None:
    dist.init_process_group("gloo")
    if fail:
        if dist.get_rank() == 1:
            raise RuntimeError("on purpose")
        time.sleep(10_000)  # unlike a collective, it does not see that the other is gone
    from user_models import Regression, floats

    import moec

    torch.manual_seed(0)
    source, inputs = Regression(), floats(4)
    source(*inputs)[0].backward()
    wanted = {name: p.grad for name, p in source.named_parameters()}
    model = moec.parallelize(source, moec.Plan(ep=dist.get_world_size()), example_inputs=tuple(x[:2] for x in inputs))
    model(*(moec.shard_batch(x, model) for x in inputs))[0].backward()
    grads = moec.full_grads(model)
    worst = max(float((grads[n] - g).abs().max() / g.abs().max().clamp_min(1e-6)) for n, g in wanted.items())
    cores: list = [None] * dist.get_world_size()
    dist.all_gather_object(cores, sorted(os.sched_getaffinity(0)))
    if dist.get_rank() == 0:
        print(json.dumps({"world": dist.get_world_size(), "worst": worst, "cores": cores}))
    dist.destroy_process_group()


if __name__ == "__main__":
    run("--fail" in sys.argv)

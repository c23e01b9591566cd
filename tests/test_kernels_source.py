"""Generated source: deterministic names, whole files, imported from the cache directory; no Triton is a clear error."""

import subprocess
import sys

import pytest

from moec import MoecError
from moec.runtime.kernels.source import HEADER, cache_directory, file_name, load, write

SOURCE = '"""A kernel\'s module."""\n\nanswer = 42\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEC_KERNELS", str(tmp_path / "made" / "here"))
    return tmp_path / "made" / "here"


def test_load_imports_a_file_named_by_its_text(cache):
    pytest.importorskip("triton", reason="load imports triton")
    module = load(SOURCE, "demo")
    assert module.answer == 42
    assert [f.name for f in cache.glob("*.py")] == [file_name(SOURCE, "demo")]
    assert (cache / file_name(SOURCE, "demo")).read_text() == HEADER + SOURCE
    assert load(SOURCE, "demo") is module
    assert load(SOURCE + "# more\n", "demo") is not module


def test_the_name_is_the_same_in_every_process():
    code = f"from moec.runtime.kernels.source import file_name; print(file_name({SOURCE!r}, 'demo'))"
    told = subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE).stdout
    assert told.strip() == file_name(SOURCE, "demo") != file_name(SOURCE + " ", "demo")


def test_an_edited_file_is_replaced_and_nothing_is_left_over(cache):
    path = write(SOURCE, "demo", cache)
    path.write_text("answer = 41\n")
    assert write(SOURCE, "demo", cache).read_text() == HEADER + SOURCE
    assert list(cache.iterdir()) == [path]


def test_without_triton_the_error_names_the_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MoecError, match=r"kernel demo: .*triton[\s\S]*way out"):
        load(SOURCE, "demo")


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoecError, match="MOEC_KERNELS"):
        write(SOURCE, "demo", tmp_path / "file" / "below")


def test_default_directory_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("MOEC_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "moec" / "kernels"

"""``Overlap(chunks="auto")``: the number of chunks follows the machines, and nothing else."""

import re
from functools import cache

import grid
import pytest

import moec
from moec.chunks import MORE, choose
from moec.runtime.collectives import is_start

BASE = {"matmul_flops": {"float64": 1e9}, "memory_bytes": 1e10, "op_overhead_s": 1e-7}
MACHINES = {
    "rows take as long as products": {**BASE, "links": {"network": {"alpha_s": 1e-7, "bytes_per_s": 3e7}}},
    "each exchange takes as long as a product": {**BASE, "links": {"network": {"alpha_s": 1e-2, "bytes_per_s": 1e12}}},
}


@cache
def compiled(cluster, chunks="auto", by="auto"):
    data = grid.batch(B=8, S=32)
    plan = moec.Plan(dp=2, ep=2, overlap=moec.Overlap(chunks=chunks, chunk_by=by, cluster=cluster))
    return moec.compile_program(grid.build("plain"), plan, 2, (), data, training=True)


@pytest.mark.parametrize(
    ("seconds", "best", "compared"),
    [
        ({1: 8.0, 2: 4.0, 3: 3.0, 4: 2.0}, 4, "1234"),
        ({1: 8.0, 2: 4.0, 3: 3.0, 4: 4.0}, 3, "1234"),
        ({1: 8.0, 2: 9.0, 3: 1.0, 4: 1.0}, 1, "12"),  # it stops where more are no longer faster
        ({1: 8.0, 2: 8.01, 3: 8.0, 4: 7.96}, 1, "1234"),  # of as fast, the fewest
        ({1: 8.0, 2: None, 3: 4.0, 4: 2.0}, 4, "1234"),  # what is refused rules out that number
        ({1: None, 2: 4.0, 3: 4.5, 4: 1.0}, 2, "123"),
    ],
)
def test_the_fastest_number_is_chosen(monkeypatch, seconds, best, compared):
    def compiled(plan):
        if seconds[n := plan.overlap.chunks] is None:
            raise moec.MoecError(f"not {n}", where="here")
        return n

    monkeypatch.setattr("moec.chunks.step_seconds", lambda n, *_: seconds[n])
    auto = moec.Plan(overlap=moec.Overlap(chunks="auto", chunk_by="tokens"))
    plan, said = choose(auto, compiled, {}, 8)
    assert plan.overlap.chunks == best and re.match(rf"chunks=auto is {best}( of tokens)?;", said)
    assert sorted(re.findall(r"(\d)(?: of tokens)?: ", said)) == list(compared)
    seconds |= dict.fromkeys((1, *MORE))
    with pytest.raises(moec.MoecError, match="not 1"):
        choose(auto, compiled, {}, 8)


def test_a_batch_of_few_sequences_is_cut_into_few(monkeypatch):
    """Two sequences a chunk at least; any tokens are compared as well, and of as fast, the fewest chunks."""
    monkeypatch.setattr("moec.chunks.step_seconds", lambda overlap, *_: 9.0 / overlap.chunks)
    auto = moec.Plan(overlap=moec.Overlap(chunks="auto"))
    for sequences, most in ((3, 1), (4, 2), (5, 2), (6, 3), (7, 3), (8, 4)):
        plan, said = choose(auto, lambda plan: plan.overlap, {}, sequences)
        tried = {(int(n), by) for n, by in re.findall(r"(\d) of (\w+): ", said)}
        assert tried == {(n, "tokens") for n in MORE} | {(n, "sequences") for n in MORE if n <= most}
        assert (plan.overlap.chunks, plan.overlap.chunk_by) == (4, "sequences" if most == 4 else "tokens")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    for i, (name, fields) in enumerate(MACHINES.items()):
        (folder / f"{i}.yaml").write_text(moec.cost.Cluster.from_dict(fields, name).to_yaml())
    return [str(folder / f"{i}.yaml") for i in range(len(MACHINES))]


def chunks_of(program):
    """Every chunk sends the counts of its rows once, in the forward."""
    starts = [n for n in program.step.forward.graph.nodes if is_start(n.target)]
    return sum("exchange_counts" in str(n.target) for n in starts)


def said(program):
    line = next(w for w in program.why_not if w.startswith("chunks=auto"))
    of = r"(\d+)(?: of (tokens|sequences))?"
    predicted = {(int(n), by or "tokens"): float(ms) for n, by, ms in re.findall(of + r": ([\d.]+) ms", line)}
    n, by = re.match(rf"chunks=auto is {of};", line).groups()
    return (int(n), by or "tokens"), predicted


def test_chunks_follow_the_machines(files):
    many, one = compiled(files[0]), compiled(files[1], by="tokens")
    (chosen, predicted), (alone, others) = said(many), said(one)
    assert chosen[0] > 1 and chunks_of(many) == chosen[0] and predicted[chosen] <= min(predicted.values()) * 1.0101
    assert {by for _, by in predicted} == {"tokens", "sequences"}
    assert predicted[2, "sequences"] < predicted[2, "tokens"]  # attention runs beside exchanges
    assert alone == (1, "tokens") and chunks_of(one) == 1 and others[2, "tokens"] > others[1, "tokens"]


def test_the_predicted_step_is_that_of_the_program(files):
    program = compiled(files[0])
    chosen, predicted = said(program)
    for chunks in {(1, "tokens"), chosen}:
        alone = compiled(files[0], *chunks)
        shapes = {s.path: (8, 32) for s in alone.inputs.values()}
        assert predicted[chunks] == pytest.approx(moec.timeline(alone, files[0], shapes).step.step_s * 1e3, abs=1e-3)


@pytest.mark.nightly
def test_what_fits_nowhere_is_refused(files):
    plan = moec.Plan(dp=2, ep=2, overlap=moec.Overlap(chunks="auto", cluster=files[0], memory_gb=1e-6))
    with pytest.raises(moec.MoecError, match="memory_gb"):
        moec.compile_program(grid.build("plain"), plan, 2, (), grid.batch(), training=True)


def test_what_a_number_of_chunks_is_refused_for_rules_out_that_number(files):
    """``current`` scales all tokens together."""
    overlap = moec.Overlap(chunks="auto", chunk_by="tokens", cluster=files[0])
    plan = moec.Plan(dp=2, ep=2, overlap=overlap, precision=moec.Precision(fp8="current"))
    program = moec.compile_program(grid.build("plain"), plan, 2, (), grid.batch(B=8, S=32), training=True)
    line = next(w for w in program.why_not if w.startswith("chunks=auto"))
    assert line.startswith("chunks=auto is 1;") and "2 of tokens: " in line and "scales all values together" in line
    assert chunks_of(program) == 1

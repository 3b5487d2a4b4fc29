"""benchmarks/training_step.py, pipeline_step.py, long_document.py and loss_curve.py on the CPU, and
arguments of every benchmark."""

import argparse
import contextlib
import csv
import io
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from programs import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import attention  # noqa: E402
import long_document  # noqa: E402
import loss_curve  # noqa: E402
import pipeline_step  # noqa: E402
import planner  # noqa: E402
import server_step  # noqa: E402
import step_model  # noqa: E402
import step_variants  # noqa: E402
import training_step  # noqa: E402
import transport  # noqa: E402
import watching  # noqa: E402
from attention_peers import Unavailable  # noqa: E402
from context_parallel import HeadTail, context_attention, rows_of  # noqa: E402
from step_loop import add_session_arguments  # noqa: E402
from step_model import add_model_arguments, linear_length  # noqa: E402
from step_report import (  # noqa: E402
    Limit,
    Run,
    disagreement,
    draw_timeline,
    largest_difference,
    summarize,
)
from step_variants import PERMUTED, VARIANTS, chosen_variants  # noqa: E402
from torch_context_parallel import torch_way  # noqa: E402
from training_step import run_variant  # noqa: E402
from workloads import Workload, add_arguments, make_workload, sorted_workload  # noqa: E402

LENGTHS = [700, 30, 200, 5, 900, 61, 350, 17, 120]
HEADS = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
MODEL = [
    "--layers",
    "2",
    "--hidden",
    "32",
    *HEADS,
    "--ffn",
    "64",
    "--vocab",
    "97",
]
CPU = torch.device("cpu")
FLOAT32_NOISE = 5e-6  # of losses near 5 that differ only in the order of sums


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_model_arguments(parser)
    add_session_arguments(parser)
    return parser.parse_args([*MODEL, *flags])


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return path


# Documents.


def test_workloads_fill_every_rank(lengths_file):
    drawn = make_workload(parsed("--lengths", str(lengths_file), "--tokens", "512"), 3, 4)
    assert [[sum(pack) for pack in step] for step in drawn.packs] == [[512] * 3] * 4
    assert not drawn.crosses_ranks and drawn.packs[0] != drawn.packs[1]
    flags = ["--lengths", str(lengths_file), "--tokens", "512", "--longest-last"]
    ordered = make_workload(parsed(*flags), 3, 4)
    assert ordered.packs == [[sorted(lengths) for lengths in step] for step in drawn.packs]
    assert ordered.packs != drawn.packs
    equal = make_workload(parsed("--equal", "128", "--tokens", "512"), 2, 1)
    assert equal.packs == [[[128] * 4] * 2]
    one = make_workload(parsed("--document", "1024"), 2, 3)
    assert one.packs == [[[1024]]] * 3 and one.tokens == 512 and one.crosses_ranks
    flags = ("--mixed", "800", "--lengths", str(lengths_file), "--tokens", "512")
    mixed = make_workload(parsed(*flags), 3, 4)
    assert all(800 in pack and sum(pack) == 3 * 512 for (pack,) in mixed.packs)
    assert mixed.crosses_ranks and len(mixed.packs[0][0]) > 2


def test_sorted_steps_have_like_work_and_the_documents_of_their_window(lengths_file):
    drawn = make_workload(parsed("--lengths", str(lengths_file), "--tokens", "1024"), 3, 7)
    windows = [range(3), range(3, 5), range(5, 7)]
    dealt = sorted_workload(drawn, windows, 100.0)
    for window in windows:
        before, after = (sum(map(each.lengths, window), []) for each in (drawn, dealt))
        assert sorted(before) == sorted(after)

    def spread(workload: Workload, step: int) -> int:
        work = [sum(n * (n + 100) for n in pack) for pack in workload.packs[step]]
        return max(work) - min(work)

    assert sum(spread(dealt, step) for step in range(7)) < sum(spread(drawn, s) for s in range(7))
    assert [len(packs) for packs in dealt.packs] == [3] * 7
    rows = [dealt.rows_of(2, rank) for rank in range(3)]
    assert [len(each) for each in rows] == [sum(pack) for pack in dealt.packs[2]]
    assert rows[0].stop == rows[1].start and rows[2].stop == sum(dealt.lengths(2))


def test_length_of_equal_flops():
    args = parsed("--hidden", "8", "--heads", "2", "--kv-heads", "2", "--head-dim", "4")
    args.ffn, args.vocab, args.layers = 1, 16, 2
    # wq, wk, wv, wo of 8 x 8, 3 matrices of 8 x 1, and half of the head's 16 x 8.
    assert linear_length(args) == (4 * 64 + 24 + 64) / 8


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "pass --lengths, --equal or --document"),
        (["--equal", "100", "--tokens", "512"], "--equal is 100; expected a divisor"),
        (["--document", "1023"], "--document is 1023 with 2 ranks"),
        (["--document", "1024", "--tokens", "9"], "no --tokens"),
        (["--mixed", "64"], "no documents"),
        (["--mixed", "1025", "--tokens", "512", "--lengths", "LENGTHS"], "expected 1 to 1024"),
        (["--equal", "128", "--longest-last"], "expected no --document, --equal"),
        (["--mixed", "9", "--lengths", "LENGTHS", "--longest-last"], "or --mixed"),
    ],
)
def test_workloads_that_do_not_fit_are_refused(flags, message, lengths_file):
    flags = [str(lengths_file) if flag == "LENGTHS" else flag for flag in flags]
    with pytest.raises(ValueError, match=message):
        make_workload(parsed(*flags), 2, 1)


WHOLE = Workload([[[300, 212], [512]]] * 4, 512)
CROSSING = Workload([[[300, 700, 5, 19]]] * 4, 512, crosses_ranks=True)


def test_variants_that_cannot_run_are_refused():
    def default(workload: Workload, device_type: str) -> set[str]:
        return set(chosen_variants(None, workload, device_type))

    every = {"flash", "plain", "context", "process_group", "process_group pingpong", "peer"}
    assert default(WHOLE, "cuda") == every
    assert default(WHOLE, "cpu") == every - {"peer"}
    assert default(CROSSING, "cuda") == every - {"flash", "plain"}
    assert chosen_variants([PERMUTED], WHOLE, "cpu") == [PERMUTED]
    for names, workload, message in (
        (["peer"], WHOLE, "expected some of flash"),
        (["plain"], CROSSING, "expected some of context, process_group,"),
        (["other"], WHOLE, "expected some of flash"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_variants(names, workload, "cpu")


def test_emulated_links_are_those_of_two_gpus(lengths_file, monkeypatch, capsys):
    command = ["training_step.py", "--lengths", str(lengths_file), "--tokens", "512"]
    monkeypatch.setenv("WORLD_SIZE", "2")

    def parse(*flags: str, num_gpus: int) -> argparse.Namespace:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(sys, "argv", [*command, *flags])
        return training_step.arguments()[0]

    assert "peer" not in parse("--device", "cuda", "--links", "host", num_gpus=2).variants
    assert "peer" in parse("--device", "cuda", "--links", "nvlink", num_gpus=2).variants
    assert "peer" not in parse("--device", "cpu", "--links", "host", num_gpus=0).variants
    for flags, message in (
        (["--links", "socket"], "--links is socket, with 2 processes and 1 GPUs; needs two GPUs"),
        (["--links", "infiniband"], "invalid choice: 'infiniband'"),
    ):
        with pytest.raises(SystemExit):
            parse("--device", "cuda", *flags, num_gpus=1)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--device", "cuda", "--links", "host", "--variants", "peer", num_gpus=2)
    assert "on cuda over emulated links" in capsys.readouterr().err
    hybrid = ("--device", "cuda", "--links", "host", "--variants", "hybrid")
    with pytest.raises(SystemExit):
        parse(*hybrid, num_gpus=2)
    assert "pass --ranks-per-node" in capsys.readouterr().err
    assert parse(*hybrid, "--ranks-per-node", "1", num_gpus=2).variants == ["hybrid"]
    for name in ("host", "socket"):
        assert training_step.LINKS[name]["NCCL_P2P_DISABLE"] == "1"


LIST = ["--lengths", "LENGTHS", "--tokens", "512"]
BENCHMARKS = {  # flags that each needs
    attention: [],
    long_document: ["--document", "1024"],
    loss_curve: LIST,
    pipeline_step: LIST,
    planner: ["--lengths", "LENGTHS"],
    server_step: ["server", *LIST],
    training_step: LIST,
    transport: [],
    watching: [],
}


@pytest.fixture
def refusal(lengths_file, monkeypatch, capsys):
    """A function that parses flags of a benchmark, and returns why it refuses them."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "2")

    def refused(module, *flags: str, has_gpu: bool) -> str:
        needed = [str(lengths_file) if flag == "LENGTHS" else flag for flag in BENCHMARKS[module]]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(sys, "argv", ["benchmark", *needed, *flags])
        with pytest.raises(SystemExit):
            module.arguments()
        return capsys.readouterr().err

    return refused


WITH_OUT = [module for module in BENCHMARKS if module is not pipeline_step]


@pytest.mark.parametrize("module", WITH_OUT, ids=lambda module: module.__name__)
def test_benchmarks_refuse_files_that_they_cannot_write(module, refusal):
    assert "--out /proc/x cannot be written: " in refusal(module, "--out", "/proc/x", has_gpu=True)


ON_CPU_TOO = [long_document, loss_curve, pipeline_step, server_step, training_step]


@pytest.mark.parametrize("module", [*ON_CPU_TOO, transport], ids=lambda module: module.__name__)
def test_benchmarks_without_a_gpu_say_so(module, refusal):
    why = refusal(module, has_gpu=False)
    assert ("finds no CUDA device; pass --device cpu" in why) == (module in ON_CPU_TOO)
    assert ("measures links of CUDA devices, and torch finds none" in why) == (module is transport)


# Context parallelism.


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_share_every_document(num_ranks):
    lengths = np.array([1, 2, 5, 64, 1200, 7])
    held = [rows_of(lengths, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(np.concatenate(held)) == list(range(lengths.sum()))
    assert all((np.diff(rows) > 0).all() for rows in held)
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    pairs = np.array([position[rows].sum() for rows in held])
    assert pairs.max() <= 1.01 * pairs.mean()


CONTEXT_CASE = Case([[1, 61, 240, 2, 19, 333, 7, 64]], heads_q=4, heads_kv=2, head_dim=16)


def context_results(rank: int, world_size: int, drops_keys: bool) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's rows, and their out, dq, dk, dv."""
    group = dist.new_group()
    shards = HeadTail.of(CONTEXT_CASE.all_lengths, group, CPU)
    if drops_keys:
        shards = replace(shards, seen=shards.seen.roll(1))
    q, k, v, grad_out = (tensor[shards.rows] for tensor in CONTEXT_CASE.inputs())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = context_attention(*leaves, shards)
    grads = torch.autograd.grad(out, leaves, grad_out)
    dist.destroy_process_group(group)
    return shards.rows, [out.detach(), *grads]


@pytest.mark.parametrize("drops_keys", [False, True])
def test_context_parallel_attention_is_attention(ranks, drops_keys):
    truths = oracle.forward_backward(CONTEXT_CASE)
    results = [torch.full_like(truth, torch.nan) for truth in truths]
    for rows, tensors in ranks(3).run(context_results, drops_keys):
        for result, tensor in zip(results, tensors, strict=True):
            result[rows] = tensor
    if drops_keys:
        with pytest.raises(AssertionError):
            oracle.assert_close(results, truths, [1e-12] * 4)
    else:
        oracle.assert_close(results, truths, [1e-12] * 4)


def test_torch_context_parallel_raises_if_it_cannot_run():
    with (
        pytest.raises(Unavailable, match="need CUDA"),
        torch_way("torch cudnn", CROSSING, (4, 2), 16, CPU),
    ):
        pass


# Steps.


def losses_of(rank: int, world_size: int, workload: Workload, names: list[str]) -> list:
    """Return losses by variant, the profile of the last, and whether all ranks have spans."""
    args = parsed("--device", "cpu", "--learning-rate", "1e-2", "--ranks-per-node", "1")
    by_variant, run, spans = {}, None, []
    for name in names:
        run, spans = run_variant(args, workload, CPU, VARIANTS[name])
        by_variant[name] = run.losses
    return [by_variant, run.mean_profile(), [bool(each) for each in spans]]


@pytest.mark.parametrize(
    "workload, names",
    [
        (WHOLE, ["plain", PERMUTED, "hybrid", "process_group"]),
        (CROSSING, ["process_group pingpong", "hybrid pingpong", "process_group", "context"]),
    ],
    ids=["whole", "crossing"],
)
def test_variants_train_alike(ranks, workload, names):
    for losses, profile, has_spans in ranks(2).run(losses_of, workload, names):
        first = losses[names[0]]
        assert len(first) == 4 and first[0] - first[-1] > 0.1  # it learns
        for name in names:
            assert losses[name] == pytest.approx(first, abs=FLOAT32_NOISE)
        assert has_spans == [True, True]
        assert all(len(ms) == 2 and min(ms) >= 0 for ms in profile.values())
        assert min(profile["communication_ms"]) > 0 and min(profile["attention_ms"]) > 0


def wrong_losses(rank: int, world_size: int) -> list[list[float]]:
    """Return losses of the plain run, and of one whose documents see each other."""
    args, variant = parsed("--device", "cpu", "--learning-rate", "1e-2"), VARIANTS["plain"]

    def joined(workload: Workload, *others) -> step_variants.Share:
        one = replace(workload, packs=[[[sum(pack)] for pack in step] for step in workload.packs])
        return step_variants.own_share(one, *others)

    return [
        run_variant(args, WHOLE, CPU, each)[0].losses
        for each in (variant, replace(variant, share=joined))
    ]


def test_wrong_attention_changes_the_losses(ranks):
    for plain, wrong in ranks(2).run(wrong_losses):
        assert max(abs(a - b) for a, b in zip(plain, wrong, strict=True)) > 10 * FLOAT32_NOISE


def test_training_step_saves_its_figures(lengths_file, tmp_path):
    out = tmp_path / "step.json"
    flags = ["--lengths", lengths_file, "--tokens", "512", "--steps", "4", "--out", out]
    flags += ["--learning-rate", "1e-2", "--turns", "2", "--links", "host"]
    script = [ROOT / "benchmarks" / "training_step.py", "--device", "cpu"]
    result = run_ranks([*script, *MODEL, *flags], 2, dict(os.environ))
    assert result.returncode == 0, result.stderr
    output = result.stdout
    names = ["flash", "plain", "context", "process_group", "process_group pingpong"]
    assert sum(line.startswith("loss ") for line in output.splitlines()) == len(names)
    record = json.loads(out.read_text())
    assert list(record["variants"]) == names and len(record["attention_ms"]["plain"]) == 4
    summary = record["summary"]
    assert summary["links"] == "gloo, which ignores --links" and summary["links"] in output
    assert summary["process_group: links, GB/s as planned with"] == 2
    for name in names[1:]:
        assert summary[f"{name}: max loss difference"] <= FLOAT32_NOISE
    for name in names:
        losses = record["variants"][name]["losses"]
        assert len(losses) == 4 and losses[3] < losses[0]
        assert 0 <= summary[f"{name}: hidden communication"] <= 1
        assert summary[f"{name}: spread of its runs"] >= 0
        assert (tmp_path / f"step.{name.replace(' ', '_')}.png").stat().st_size > 1000
    for figure in ("times the balanced limit", "times faster than context", "peak, GiB"):
        assert f"process_group pingpong: {figure}" in summary
    assert (
        summary["process_group pingpong: bytes of a layer"]
        == (summary["process_group: bytes of a layer"])
    )
    with (tmp_path / "step.csv").open() as file:
        table = {(row["what"], row["figure"]): row["value"] for row in csv.DictReader(file)}
    assert float(table["context", "step, ms"]) == summary["context: step, ms"]
    assert float(table["plain", "profiled exposed_ms, rank 1"]) >= 0


def test_training_step_against_a_sorting_loader(lengths_file, tmp_path):
    out = tmp_path / "step.json"
    variants = ["plain", "sorted", "sorted process_group"]
    flags = ["--lengths", lengths_file, "--tokens", "512", "--window", "2"]
    flags += ["--steps", "5", "--skip", "1"]
    script = [ROOT / "benchmarks" / "training_step.py", "--device", "cpu", "--out", out]
    command = [*script, *MODEL, *flags, "--variants", *variants]
    result = run_ranks(command, 2, dict(os.environ))
    assert result.returncode == 0, result.stderr
    saved = json.loads(out.read_text())
    summary = saved["summary"]
    step_ms = saved["variants"]["sorted"]["step_ms"]
    assert len(step_ms) == 5 and summary["sorted: step, ms"] == statistics.fmean(step_ms[1:])
    assert summary["sorted process_group: max loss difference"] <= FLOAT32_NOISE
    assert summary["sorted process_group: imbalance after"] >= 1
    for name in variants[1:]:
        assert summary[f"{name}: times the balanced limit"] > 0
        assert f"{name}: times plain, median of steps" not in summary
    assert "sorted: max loss difference" not in summary
    assert summary["plain: most tokens of a rank"] == 512
    assert summary["sorted: most tokens of a rank"] > 512
    refused = run_ranks([*command, "--window", "3"], 2, dict(os.environ))
    assert "--window is 3; needs a divisor of --steps without those of --skip, 4" in refused.stderr


def pipeline_losses(
    rank: int, world_size: int, flags: list[str], dtype: torch.dtype
) -> list[list[float]]:
    """Return the losses of each variant's steps."""
    with (
        mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)),
        mock.patch.object(sys, "argv", ["pipeline_step.py", *flags]),
    ):
        args, workload = pipeline_step.arguments()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    with (
        mock.patch.object(step_model, "dtype_of", lambda _: dtype),
        mock.patch.object(pipeline_step, "dtype_of", lambda _: dtype),
    ):
        return [
            pipeline_step.run_variant(args, workload, mesh, CPU, variant).losses
            for variant in args.variants
        ]


@pytest.mark.parametrize(
    "dtype, noise", [(torch.float32, FLOAT32_NOISE), (torch.bfloat16, 1e-2)], ids=str
)
def test_pipelines_train_alike(own_ranks, lengths_file, dtype, noise):
    flags = ["--lengths", str(lengths_file), "--tokens", "512", "--device", "cpu", "--checkpoint"]
    flags += [*MODEL, "--micro-batches", "3", "--steps", "4", "--learning-rate", "1e-2"]
    for first, *others in own_ranks(4).run(pipeline_losses, flags, dtype):
        assert first[-1] < first[0]
        for losses in others:
            assert losses == pytest.approx(first, abs=noise)


def by_main(rank: int, world_size: int, script: str, folder: Path, flags: list[str]) -> str:
    """Run the main function of a benchmark in the open group, and return its output."""
    module = {"long_document": long_document, "loss_curve": loss_curve}[script]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)):
        args, workload = module.arguments([*flags, "--device", "cpu"])
    run = long_document.run if module is long_document else loss_curve.train
    result, output = run(args, workload, CPU), io.StringIO()
    if rank == 0:
        with contextlib.redirect_stdout(output):
            module.show(result)
        module.save(folder, result)
    return output.getvalue()


def test_long_document_against_a_rank_alone(ranks, tmp_path):
    flags = ["--document", "1000", *HEADS, "--rounds", "1", "--keep-inputs-gb", "1"]
    output = ranks(2).run(by_main, "long_document", tmp_path, flags)[0]
    assert "alone: 707 tokens" in output  # 1000 / sqrt(2) tokens have half of the pairs
    for way in ("peer", "torch cudnn", "torch flash"):
        assert f"{way} is left out" in output
    with (tmp_path / "long_document.csv").open() as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["alone", "process_group", "context"]
    assert float(rows["context"]["difference"]) < 1e-5
    with (tmp_path / "long_document_ranks.csv").open() as file:
        profiled = {(row["way"], row["figure"]): row for row in csv.DictReader(file)}
    assert {way for way, _ in profiled} == set(rows)
    assert float(profiled["process_group", "backward attention_ms"]["1"]) > 0
    flops = 4 * 4 * 16 * 1000 * 1001 / 2 / 2
    row = rows["process_group"]
    for name, share in (("forward", 1), ("backward", 2.5)):
        tflops = share * flops / float(row[f"{name}_ms"]) / 1e9
        assert float(row[f"{name}_tflops"]) == pytest.approx(tflops)


def test_loss_curve_against_noise(ranks, lengths_file, tmp_path):
    flags = ["--lengths", str(lengths_file), "--tokens", "512", "--steps", "5"]
    flags = [*MODEL, *flags, "--learning-rate", "1e-2"]
    output = ranks(2).run(by_main, "loss_curve", tmp_path, flags)[0]
    assert PERMUTED in output and "root mean square" in output
    with (tmp_path / "loss.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert len(rows) == 5 and rows[4]["plain"] < rows[0]["plain"]
    for row in rows:
        assert row["plain"] == pytest.approx(row["process_group"], abs=FLOAT32_NOISE)
        assert row["plain"] == pytest.approx(row[PERMUTED], abs=FLOAT32_NOISE)
    assert (tmp_path / "loss.png").stat().st_size > 1000


# Figures.


def test_differences_by_hand():
    difference = loss_curve.Difference.of([1.0, 2.0, 3.0], [1.0, 5.0, -1.0])
    assert difference == loss_curve.Difference(4.0, pytest.approx((25 / 3) ** 0.5))
    assert math.isnan(loss_curve.Difference.of([1.0, math.nan], [1.0, 5.0]).largest)


def test_figures_by_hand():
    profile = {"exposed_ms": [1.0, 3.0], "communication_ms": [10.0, 4.0], "step_ms": [50.0, 60.0]}
    still = {**profile, "exposed_ms": [0.5, 1.5], "attention_ms": [10.0, 30.0]}
    worse = {**profile, "exposed_ms": [1.0, 9.0], "communication_ms": [10.0, 10.0]}
    runs = {
        "plain": Run([9e9] * 3 + [100.0, 120.0], [2.0] * 5, profiles=[still]),
        "peer": Run([9e9] * 3 + [90.0, 100.0], [2.0] * 4 + [2.5], profiles=[profile, worse]),
    }
    # The slowest rank's attention exceeds the mean by 20 in one step, and by 10 in the next.
    limits = {"plain": Limit([[9e9, 0]] * 3 + [[10, 50], [30, 10]], [100.0, 120.0])}
    summary = summarize(runs, limits, 2)
    assert summary["plain: balanced limit, ms"] == pytest.approx((80 + 110) / 2)
    assert summary["peer: times the balanced limit"] == pytest.approx(95 / 95)
    of_profiled = summary["peer: times the balanced limit, profiled steps"]
    assert of_profiled == pytest.approx((60 + 60) / (60 - (30 - 20)))
    assert summary["peer: times faster than plain"] == pytest.approx(110 / 95)
    assert summary["peer: times plain, median of steps"] == pytest.approx(
        (90 / 100 + 100 / 120) / 2
    )
    assert summary["peer: max loss difference"] == 0.5
    assert summary["peer: exposed communication, ms"] == (3.0 + 9.0) / 2
    assert summary["peer: exposed communication, of the step"] == pytest.approx((3 + 9) / 2 / 60)
    assert summary["peer: exposed communication, of the step, worst"] == pytest.approx(9 / 60)
    hidden = (1 - 3 / 4 + 1 - 9 / 10) / 2
    assert summary["peer: hidden communication"] == pytest.approx(hidden)
    above = (1 + 6) / 2 - 1
    assert summary["peer: exposed communication above plain's, mean rank, ms"] == above
    assert runs["peer"].mean_profile()["exposed_ms"] == [1.0, 6.0]


def test_losses_that_differ_or_are_nan():
    runs = {"plain": Run([9.0], [2.0, 1.5]), "peer": Run([9.0], [2.0, 1.505])}
    assert disagreement(runs, torch.bfloat16) is None
    assert disagreement(runs, torch.float32) == (
        "step 1 has loss 1.5 in 'plain' and 1.505 in 'peer'; expected a difference of at most 2e-05"
    )
    runs["sorted"] = Run([9.0], [3.0, 1.0])  # has other documents in each step
    assert disagreement(runs, torch.bfloat16) is None
    runs["sorted"].losses[1] = math.nan
    assert disagreement(runs, torch.bfloat16) == (
        "step 1 has loss nan in 'sorted'; expected a finite loss"
    )
    assert math.isnan(largest_difference(runs["plain"], runs["sorted"]))


def test_turns_by_hand():
    turns = [
        Run([9e9] * 3 + ms, [2.0], profiles=[{}] * i) for i, ms in enumerate([[10, 20], [14, 22]])
    ]
    run = Run.mean_of(turns)
    assert run.measured_ms() == [12, 21] and run.turns_ms == [15, 18]
    assert run.profiles == [{}] and run.losses == [2.0]
    turns[0].losses[0] = math.nan
    assert math.isnan(Run.mean_of(turns).losses[0])


def test_timeline_of_ranks_without_spans(tmp_path):
    draw_timeline(tmp_path / "empty.png", "plain", [[], []])
    assert (tmp_path / "empty.png").exists()

"""Servers of the launcher: the script sees the other ranks only, and trains as on those alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_command
from programs import run_ranks
from test_run import ENVIRONMENT

from distca import run

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # under pytest
TRAIN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, os.environ["TESTS"])
import parallel_training as training
import uneven_training
import distca

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, losses = dist.get_rank(), []
model = training.build(distca.core_attention)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = uneven_training.batches_of(rank, 6)
for batch in batches:
    distca.plan(batch.documents, ahead=True)
for batch in batches:
    logits = model(batch.tokens, batch.documents.position_ids, batch.documents)
    loss = training.loss_sum(logits, batch.labels) / (batch.labels >= 0).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    losses.append(mean.item())
json.dump(losses, open(os.environ["REPORT"] + str(rank), "w"))
dist.destroy_process_group()
"""
PLACES = """
import json, os, sys
import torch
import torch.distributed as dist
import distca

dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
report = {name: int(os.environ[name]) for name in names}
assert (dist.get_rank(), dist.get_world_size()) == (report["RANK"], report["WORLD_SIZE"])
for tolerance in (0.01, 0.02):
    session = distca.init(options=distca.Options(tolerance=tolerance, link_gb_per_s=1e5))
    plan = distca.plan(distca.Documents([0, 2000] if dist.get_rank() == 0 else [0]))
    report["bytes_in"] = plan.report().bytes_in
    distca.close()
json.dump(report, open(os.environ["REPORT"] + str(dist.get_rank()), "w"))
"""


def launch(
    folder: Path, script: str, num_ranks: int, flags: list, by_torchrun: bool = False
) -> tuple[subprocess.CompletedProcess, list]:
    """Run a script; return how it ended, and the reports of its ranks."""
    (folder / "train.py").write_text(script)
    own = {"REPORT": str(folder / "report"), "TESTS": str(Path(__file__).parent)}
    command, environment = ["-m", "distca.run", *flags, folder / "train.py"], {**ENVIRONMENT, **own}
    if by_torchrun:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
        result = run_command([sys.executable, *torchrun, *command], cwd=folder, env=environment)
    else:
        result = run_ranks(command, num_ranks, environment, folder)
    paths = sorted(folder.glob("report*"))
    reports = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return result, reports


def test_losses_are_those_of_the_ranks_that_train(tmp_path):
    alone, expected = launch(tmp_path, TRAIN, 3, ["--no-enabled"])
    served, losses = launch(tmp_path, TRAIN, 4, ["--attention-servers", 1, "--link-gb-per-s", 1e5])
    assert (alone.returncode, served.returncode) == (0, 0), served.stderr
    assert len(losses) == 3 and len(expected[0]) == 6
    differences = [abs(a - b) for a, b in zip(losses[0], expected[0], strict=True)]
    assert max(differences) < 1e-6, differences
    assert abs(expected[0][0] - expected[0][-1]) > 1e-3  # it trains


@pytest.mark.parametrize(
    "num_ranks, servers, local_ranks",
    [(4, "2", [0, 1]), (4, "1,3", [0, 2]), (3, "1,", [0, 2]), (3, "2", [0])],
)
def test_the_script_sees_the_ranks_that_train(tmp_path, num_ranks, servers, local_ranks):
    flags = ["--attention-servers", servers]
    result, reports = launch(tmp_path, PLACES, num_ranks, flags, by_torchrun=servers == "1,3")
    assert result.returncode == 0, result.stderr
    num_trainers = len(local_ranks)
    assert len(reports) == num_trainers
    for rank, report in enumerate(reports):
        assert (report["RANK"], report["WORLD_SIZE"]) == (rank, num_trainers)
        assert (report["LOCAL_RANK"], report["LOCAL_WORLD_SIZE"]) == (
            local_ranks[rank],
            num_trainers,
        )
        served = [num_bytes > 0 for num_bytes in report["bytes_in"]]
        assert served == [rank != 0 for rank in range(num_ranks)]


def test_servers_end_with_a_script_that_does_not_use_them(tmp_path):
    result, _ = launch(tmp_path, "", 2, ["--attention-servers", 1])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--attention-servers", "0"], "attention_servers is '0'; expected a positive number"),
        (["--attention-servers", "0,3"], "attention_servers is '0,3'; expected"),
        (["--attention-servers", "two"], "attention_servers is 'two'; expected"),
        (["--attention-servers", "1"], "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are not"),
    ],
)
def test_wrong_servers_are_refused_before_the_script(tmp_path, monkeypatch, capsys, flags, message):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        run.main([*flags, str(script)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "servers, flags, message",
    [
        ("4", [], "attention_servers is '4': servers is (0, 1, 2, 3); expected ranks from 1 to 3"),
        ("9,", [], "servers is (9,); expected ranks from 1 to 3"),
        ("1", ["--no-enabled"], "under enabled False rank(s) [3] compute nothing"),
        ("1", ["--server-speeds", "1*3,0"], "the ranks that hold tokens would compute all"),
    ],
)
def test_servers_that_cannot_serve_are_refused(
    tmp_path, monkeypatch, capsys, servers, flags, message
):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as end:
        run.main(["--attention-servers", servers, *flags, str(script)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err

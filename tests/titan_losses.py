"""Compare the losses of torchtitan's trainer under its own schedules and under `pooled`.

    torchrun --nproc-per-node 2 tests/titan_losses.py --steps 20

Two pipeline ranks train torchtitan's debug model in several runs, from the same weights on the same
documents. "1F1B" is the run with torchtitan's own schedule and its varlen attention. Further runs
without distca show the noise. "1F1B again" repeats the first run, and "GPipe" changes the schedule.
"reversed" trains on the micro-batches of a step in reverse order. In "pairs", a micro-batch has two
rows. "flex" uses torchtitan's flex attention, and runs only with --flex. "float32" shows the error
of bfloat16 itself. "1 document" ignores the boundaries of documents, so its losses must differ by
more than noise. Documents are parts of Python's standard library, and a token is a byte.

The optimizer, its learning rates, mixed precision and selective checkpointing are those of the
debug configuration, but the loss is computed in one chunk. Under PyTorch 2.11, this program adds
interfaces that torchtitan 0.3.0 needs, as titan_pipelines.py does.
"""

import argparse
import contextlib
import gc
import inspect
import json
import os
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import titan_model as tm
import torch
import torch.distributed as dist
from ranks import MOVE_ALWAYS
from titan_pipelines import NUM_STAGE_RANKS, newer_pipelines
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common import attention as titan
from torchtitan.models.llama3 import config_registry
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

import distca
import distca.integrations.torchtitan as integration
from distca.integrations.torchtitan_pipelines import pooled

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from stdlib_corpus import Corpus, Pack  # noqa: E402

assert IGNORE_INDEX == -100, "stdlib_corpus marks ends of documents so"

OVERRIDES = [tm.PREFIX + name for name in ("attention", "selective_checkpoint")]


@dataclass(frozen=True)
class Way:
    """How a run trains."""

    schedule: str = "1F1B"
    is_pooled: bool = False
    attention: str = "varlen"
    num_rows: int = 1  # of a micro-batch
    is_reversed: bool = False  # whether the micro-batches of a step are
    is_one_document: bool = False  # whether each row counts as one
    is_exact: bool = False  # whether it computes in float32, apart from attention


REFERENCE, OURS, WRONG = "1F1B", "pooled", "1 document"
OWN = {  # runs without distca, which show the noise
    "1F1B again": Way(),
    "GPipe": Way("GPipe"),
    "reversed": Way(is_reversed=True),
    "pairs": Way(num_rows=2),
    "flex": Way(attention="flex"),
}
WAYS = {
    REFERENCE: Way(),
    OURS: Way(attention="flex", is_pooled=True),  # the override replaces attention
    WRONG: Way(is_one_document=True),
    "float32": Way(is_exact=True),
    **OWN,
}


class PackLoader(BaseDataLoader):
    """Micro-batches of rows that are full of documents. These are cut where a row ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_rows: int  # of a step
        is_reversed: bool
        is_one_document: bool

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **others) -> None:
        self.config, self.seq_len, self.rows_per_batch = config, seq_len, local_batch_size

    def __iter__(self):
        corpus = Corpus(seed=0, context=self.seq_len)
        while True:
            packs = [corpus.next_pack(self.seq_len) for _ in range(self.config.num_rows)]
            packs = packs[::-1] if self.config.is_reversed else packs
            for first in range(0, len(packs), self.rows_per_batch):
                yield self._batch(packs[first : first + self.rows_per_batch])

    def _batch(self, packs: list[Pack]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens, positions = [], []
        for pack in packs:
            lengths = [self.seq_len] if self.config.is_one_document else pack.lengths
            tokens.append(pack.tokens.long())
            positions.append(torch.cat([torch.arange(n) for n in lengths]))
        inputs = {"input": torch.stack(tokens), "positions": torch.stack(positions)}
        return inputs, torch.stack([pack.labels() for pack in packs])

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The tokenizer of a loader that yields tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others) -> None:
        super().__init__()

    def encode(self, *args, **keywords) -> list[int]:
        raise NotImplementedError

    def decode(self, *args, **keywords) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class JoinedTrainer(Trainer):
    """torchtitan's trainer in the process group of this process."""

    def init_distributed(self) -> ParallelDims:
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())


def config_of(way: Way, args: argparse.Namespace, folder: str) -> Trainer.Config:
    registry = {
        "varlen": config_registry.llama3_debugmodel_varlen_attn,
        "flex": config_registry.llama3_debugmodel,
    }
    config = registry[way.attention]()
    config.loss = config.loss.loss_fn  # the chunked loss crashes torch 2.11 under FSDP
    config.training.steps = args.steps
    config.training.disable_cuda_graphs = True  # torchtitan refuses them with pipelines
    config.parallelism.pipeline_parallel_degree = NUM_STAGE_RANKS
    config.parallelism.pipeline_parallel_schedule = way.schedule
    config.parallelism.pipeline_parallel_microbatch_size = way.num_rows
    config.tokenizer, config.dump_folder = NoTokenizer.Config(), folder
    config.training.mixed_precision_param = "float32" if way.is_exact else args.dtype
    if args.device == "cpu":
        config.training.seq_len = tm.SEQ_LEN
    config.debug.seed = 0
    config.dataloader = PackLoader.Config(
        num_rows=config.training.local_batch_size,
        is_reversed=way.is_reversed,
        is_one_document=way.is_one_document,
    )
    if way.is_pooled:
        config.override = OverrideConfig(imports=OVERRIDES)
        pooled(config)
    return config


def train(way: Way, args: argparse.Namespace, folder: str) -> tuple[list[float], float]:
    """Return the loss of each step, and the megabytes that a plan moved (0 without plans)."""
    distca.close()
    integration.recent_figures()
    with unittest.mock.patch.object(integration.BalancedAttention, "axes", ["batch"]):
        trainer = JoinedTrainer(config_of(way, args, folder))
    losses = []

    def log(step, global_avg_loss, *others, **keywords) -> None:
        losses.append(global_avg_loss)

    trainer.metrics_processor.log = log
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(args.steps):
        trainer.step += 1
        trainer.train_step(batches)
    moved = integration.recent_figures().get("moved_mb", 0.0)
    trainer.close()
    del trainer
    gc.collect()  # torchtitan has turned off automatic collections
    distca.close()
    # Only the last stage has losses.
    found = torch.tensor(losses, dtype=torch.float64, device=args.device)
    dist.broadcast(found, dist.get_world_size() - 1)
    return found.tolist(), moved


def own_varlen(*args, num_splits: int, enable_gqa: bool = False, **keywords):
    """Call varlen_attn of a torch that lacks `num_splits` and `enable_gqa`. The former only matters
    to paged keys, and the debug model does not need the latter."""
    assert num_splits == 1 and not enable_gqa
    return varlen_attn(*args, **keywords)


def own_block_mask(*args, separate_full_blocks: bool, **keywords):
    """Call create_block_mask of a torch that always separates full blocks, without an argument."""
    assert separate_full_blocks
    return titan.create_block_mask(*args, **keywords)


@contextlib.contextmanager
def stand_ins(device: str) -> Iterator[None]:
    """Provide what torchtitan needs and this torch, or the CPU, lacks."""
    with contextlib.ExitStack() as patches:

        def patch(owner, name: str, value) -> None:
            patches.enter_context(unittest.mock.patch.object(owner, name, value))

        patches.enter_context(newer_pipelines())
        if device == "cpu":
            patches.enter_context(tm.own_flex_attention())
            patch(titan, "varlen_attn", tm.by_document)
            patch(titan, "torch", tm.InFloat32("torch"))
            patch(metrics, "build_device_memory_monitor", NoMemoryMonitor)
            patch(tm.parallel_dims, "device_type", "cpu")
            patch(utils, "device_type", "cpu")
            patch(utils, "device_module", torch.cpu)
        elif "num_splits" not in inspect.signature(varlen_attn).parameters:
            patch(titan, "varlen_attn", own_varlen)
            patch(utils, "get_cuda_flash_attention_impl", lambda: None)  # torch's own, not FA3
            patch(titan, "_compiled_create_block_mask", own_block_mask)
            # As in torchtitan's deterministic mode, because tuning of kernels takes minutes.
            untuned = {"max_autotune": False, "coordinate_descent_tuning": False}
            options = {**titan.FlexAttention.inductor_configs, **untuned}
            compiled = torch.compile(flex_attention, options=options)
            patch(titan.FlexAttention, "_compiled_flex_attn", compiled)
        yield


class NoMemoryMonitor:
    """Stands in for the monitor of a CUDA device's memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(*[0.0] * 4, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def show(losses: dict[str, list[float]], differences: dict[str, float], moved: float) -> None:
    print(f"{'step':>5}" + "".join(f"{name:>13}" for name in losses))
    for step, row in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{step:5}" + "".join(f"{loss:13.6f}" for loss in row))
    print(f"largest difference from {REFERENCE}:")
    for name, difference in differences.items():
        print(f"  {name:12} {difference:.3e}")
    noise = max(differences[name] for name in OWN if name in differences)
    if noise > 0:  # on the CPU, its own runs may have equal losses
        print(f"{OURS} differs by {differences[OURS] / noise:.2f} of the noise of its own runs")
    print(f"{OURS} moved {moved:.3f} MB a plan")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--flex", action="store_true", help="also run flex attention, compiled")
    parser.add_argument("--out", type=Path, help="JSON file of losses, differences and MB moved")
    args = parser.parse_args()
    left_out = {"flex": not args.flex, "float32": args.dtype == "float32"}
    args.ways = [name for name in WAYS if not left_out.get(name, False)]
    return args


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    distca.configure(distca.Options(**MOVE_ALWAYS))
    losses, moved = {}, {}
    with stand_ins(args.device), tempfile.TemporaryDirectory() as folder:
        # On CUDA devices, the first trainer of a process draws other weights than later ones.
        train(WAYS[REFERENCE], argparse.Namespace(**{**vars(args), "steps": 1}), folder)
        for name in args.ways:
            losses[name], moved[name] = train(WAYS[name], args, folder)
            if dist.get_rank() == 0:
                print(f"{name}: {losses[name][0]:.6f} to {losses[name][-1]:.6f}", flush=True)
    if dist.get_rank() == 0:
        differences = {
            name: max(abs(a - b) for a, b in zip(each, losses[REFERENCE], strict=True))
            for name, each in losses.items()
            if name != REFERENCE
        }
        show(losses, differences, moved[OURS])
        if args.out:
            found = {"losses": losses, "differences": differences, "moved_mb": moved}
            args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

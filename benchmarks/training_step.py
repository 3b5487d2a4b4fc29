"""Time training steps of Llama-wide blocks under FSDP2, for several ways to compute attention.

    torchrun --nproc-per-node 4 benchmarks/training_step.py --lengths lengths.json --out step.json

Two variants run without balancing: "flash" is PyTorch's varlen flash attention, and "plain" is
distca's kernels. "context" is context parallelism with distca's kernels (context_parallel.py).
"process_group", "peer" and "hybrid" are distca with these transports. In the variants whose names
end in "pingpong", blocks run on two halves in turn. All variants see the same documents, tokens and
initial weights. If a loss is not finite, or losses of the same step differ by more than 0.01 (on
CPUs 2e-5), the program ends with an error. A step is forward, backward and optimizer. It is timed
on the host from barrier to barrier with the device synchronised, so it takes as long as the slowest
rank needs. With --turns, every other turn is in reverse order. Means leave out the first steps
(--skip). Ranks measure links and their own pace in training, and with ping-pong plans use these
figures from about the eighth step on.

In "sorted", a loader sorts the documents of --window steps by the Karmarkar-Karp method. Ranks and
steps then have like work, but not equally many tokens, so look at the peak memory, too.
"sorted process_group" and "sorted peer" are distca on top of it. Documents of a step differ from
those of other variants, and over a window they are the same. So compare mean step times, and not
single steps or losses.

Documents are drawn from --lengths and lie whole on their ranks, or have one length with --equal.
With --document all ranks share one document, and with --mixed one long document is added to those
of the list. Documents then cross ranks, and variants that need whole documents are left out. With
ping-pong, each rank then holds two runs of the pack.

The balanced limit is the step time with ideal balance: the step without balancing, minus the time
by which the slowest rank's attention exceeds the mean. For this, attention of one layer (forward
and backward of each rank's own documents) is timed alone and multiplied by the number of layers.
Steps are compared with the limit of the same documents.

--links emulates slower links between the GPUs of one host, for FSDP as well as for rows. With
"host", NCCL copies through host memory. With "socket", it sends by TCP through the loopback device.
Peer memory always uses NVLink, so the variants "peer" and "peer pingpong" are left out.
--ranks-per-node divides the ranks into nodes. The variant "hybrid" uses peer memory inside these
nodes and NCCL between them.

The last steps are repeated under the profiler (device_time.py). The profile shows, by rank, exposed
communication, waiting for ranks that are behind, and the rest. The limit of these steps uses
attention inside the step. --out also writes the figures to a CSV file and a timeline of every
variant's last step, next to the JSON file.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from device_time import Span, gathered, synchronise
from step_loop import (
    add_session_arguments,
    add_step_arguments,
    check_step_arguments,
    free_memory,
    join,
    leave,
    open_session,
    peer_memory_gib,
    run_steps,
)
from step_model import add_model_arguments, check_device, dtype_of, linear_length
from step_report import NUM_WARM_UP_STEPS, Limit, Run, disagreement, save, show, summarize
from step_variants import VARIANTS, Variant, chosen_variants
from workloads import Workload, add_arguments, make_workload, sorted_workload

import distca
from distca.options import make_writable

NUM_PROFILED_STEPS = 3
HOST_LINKS = {"NCCL_P2P_DISABLE": "1"}
SOCKET_LINKS = {"NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
LINKS = {"nvlink": {}, "host": HOST_LINKS, "socket": HOST_LINKS | SOCKET_LINKS}  # NCCL's variables
LIMITS = ("flash", "plain")  # variants in which each rank computes its own documents


def arguments() -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    add_model_arguments(parser)
    add_session_arguments(parser)
    parser.add_argument(
        "--window",
        type=int,
        default=1,
        help='steps over which the variants "sorted" deal documents (default: %(default)s)',
    )
    usual = [name for name, variant in VARIANTS.items() if variant.by_default]
    add_step_arguments(parser, NUM_WARM_UP_STEPS)
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help=f"from {list(VARIANTS)} (default: {usual}, without those that cannot run)",
    )
    parser.add_argument(
        "--links", choices=LINKS, default="nvlink", help="that NCCL uses (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file; CSV and PNG files go beside it")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size == 0:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    check_step_arguments(parser, args)
    if args.window < 1 or (args.steps - args.skip) % args.window:
        parser.error(
            f"--window is {args.window}; needs a divisor of --steps without those of --skip, "
            f"{args.steps - args.skip}"
        )
    emulates = args.links != "nvlink" and args.device == "cuda"
    if emulates and min(world_size, torch.cuda.device_count()) < 2:
        parser.error(
            f"--links is {args.links}, with {world_size} processes and "
            f"{torch.cuda.device_count()} GPUs; needs two GPUs, between which links are emulated"
        )
    try:
        workload = make_workload(args, world_size, args.steps)
        args.variants = chosen_variants(args.variants, workload, args.device, not emulates)
        if emulates and "hybrid" in args.variants and args.ranks_per_node is None:
            raise ValueError(
                '--variants has "hybrid", which would use NVLink alone; pass --ranks-per-node'
            )
        check_device(args)
        make_writable("--out", args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, workload


def run_variant(
    args: argparse.Namespace,
    workload: Workload,
    device: torch.device,
    variant: Variant,
    num_profiled: int = NUM_PROFILED_STEPS,
) -> tuple[Run, list[list[Span]]]:
    """Run all steps from the initial weights, and profile the last ones again.

    Return the run, and the spans of the last step by rank.
    """
    group, session = dist.new_group(), None  # separate from FSDP's collectives
    if variant.transport is not None:
        session = open_session(args, variant.transport)
    run, spans = run_steps(args, workload, device, variant, num_profiled, group)
    if session is not None:
        run.peer_memory_gib = peer_memory_gib(session, device)
    distca.close()
    dist.destroy_process_group(group)
    return run, spans


def attention_alone(
    args: argparse.Namespace, workload: Workload, device: torch.device, kernel: str
) -> list[list[float]]:
    """Measure core attention of all layers on each rank's own documents: ms [steps][ranks]."""
    variant, dtype = VARIANTS[kernel], dtype_of(device)
    shapes = [
        (workload.tokens, heads, args.head_dim) for heads in (args.heads, *[args.kv_heads] * 2)
    ]
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    )
    grad_out = torch.randn_like(q)
    rows = []
    for step in range(len(workload.packs)):
        documents = variant.share(workload, step, None, device).documents
        ms = 0.0
        for _ in range(2):  # the first call also loads kernels and builds the layout
            synchronise(device)
            start = time.perf_counter()
            torch.autograd.grad(variant.core_attention(q, k, v, documents), (q, k, v), grad_out)
            if device.type == "cuda":
                torch.cuda.synchronize()
            ms = 1e3 * (time.perf_counter() - start)
        rows.append([each * args.layers for each in gathered(ms, device)])
    return rows


def main() -> None:
    args, workload = arguments()
    os.environ.update(LINKS[args.links])  # NCCL reads them when it starts
    device = join(args.device)
    windows = [range(args.skip)] if args.skip else []
    windows += [range(i, i + args.window) for i in range(args.skip, args.steps, args.window)]
    runs, timelines = {name: [] for name in args.variants}, {}
    for turn, num_profiled in enumerate([*[0] * (args.turns - 1), NUM_PROFILED_STEPS]):
        for name in args.variants if turn % 2 == 0 else args.variants[::-1]:
            variant, dealt = VARIANTS[name], workload
            if variant.is_sorted:
                dealt = sorted_workload(workload, windows, linear_length(args))
            run, timelines[name] = run_variant(args, dealt, device, variant, num_profiled)
            run.skip = args.skip
            runs[name].append(run)
            free_memory(device)
    runs = {name: Run.mean_of(each) for name, each in runs.items()}
    limits = {
        kernel: Limit(attention_alone(args, workload, device, kernel), runs[kernel].measured_ms())
        for kernel in LIMITS
        if kernel in runs
    }
    links = args.links if device.type == "cuda" else "gloo, which ignores --links"
    summary = {"links": links, **summarize(runs, limits, dist.get_world_size())}
    wrong = None
    if dist.get_rank() == 0:
        show(summary, runs)
        if args.out is not None:
            save(args.out, summary, runs, limits, timelines)
        wrong = disagreement(runs, dtype_of(device))
    leave()
    sys.exit(wrong)


if __name__ == "__main__":
    main()

"""Run balanced attention through peer memory under random plans and compute-sanitizer:

    torchrun --standalone --nproc-per-node 2 --no-python compute-sanitizer --tool memcheck \\
        --report-api-errors no --error-exitcode 9 python tests/sanitize_peer_attention.py

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is a separate allocation. API errors are
off, because NCCL asks the driver for kernels and memory that it can do without. The script needs
Hopper GPUs that reach each other; with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 ranks share one.
"""

import os

import torch
import torch.distributed as dist
from ranks import MOVE_ALWAYS
from test_gpu_peer import attend_to_random_plans

import distca

NUM_PLANS = int(os.environ.get("DISTCA_NUM_RANDOM_PLANS", "6"))


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    dist.init_process_group("nccl" if num_devices >= world_size else "gloo")
    distca.init(options=distca.Options(transport="peer", **MOVE_ALWAYS))
    worst, num_checked = attend_to_random_plans(rank, world_size, NUM_PLANS, seed=7)
    if not worst < 0.02:
        raise SystemExit(f"rank {rank}: error {worst}")
    text = f"{NUM_PLANS} plans, {num_checked} with canaries, largest error {worst:.1e}"
    print(f"rank {rank}: {text}", flush=True)
    distca.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

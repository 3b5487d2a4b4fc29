"""Predict attention of samples that share a prompt, as a tree and as whole documents.

One rank of N holds the group, the others nothing, so that the planner moves most of it. For each
form it prints the query-key pairs, the predicted seconds of the slowest rank and the bytes that all
ranks send, for one layer, forward and backward, of an 8B Llama on H100 (docs/prefix-trees.md).
"""

import argparse

import torch

import distca
from distca.planning.cluster import Cluster
from distca.planning.cost import AttentionShape, cost_tensor
from distca.planning.plan import CAUSAL
from distca.planning.solver import balance


def predict(documents: distca.Documents, num_ranks: int) -> tuple[float, float]:
    """Return the seconds of the slowest rank, and the bytes that all ranks send, in 1e9 bytes."""
    shape = AttentionShape()
    cost = cost_tensor(distca.Options(), shape, "cuda")
    pieces = documents.pieces(0)
    _, loads = balance(pieces, CAUSAL, cost, shape, Cluster(num_ranks), distca.Options().tolerance)
    return loads[:, 1].max().item(), loads[:, 2].sum().item() / 1e9


def forms_of(prompt: int, sample: int, num_samples: int) -> dict[str, tuple[distca.Documents, int]]:
    """Return the documents of a group and the number of their query-key pairs, by form."""
    lengths = torch.tensor([0, prompt, *[sample] * num_samples])
    parents = [-1, *[0] * num_samples]
    pairs_of_prompt = prompt * (prompt + 1) // 2
    pairs_of_sample = sample * prompt + sample * (sample + 1) // 2
    whole = (prompt + sample) * torch.arange(num_samples + 1)
    return {
        "tree": (
            distca.Documents(lengths.cumsum(0), parents=parents),
            pairs_of_prompt + num_samples * pairs_of_sample,
        ),
        "whole": (distca.Documents(whole), num_samples * (pairs_of_prompt + pairs_of_sample)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--sample", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=8, help="number of samples")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    print("| ranks | form | pairs | slowest rank | sent |\n| --- | --- | --- | --- | --- |")
    for num_ranks in args.ranks:
        for name, (documents, pairs) in forms_of(args.prompt, args.sample, args.samples).items():
            seconds, gigabytes = predict(documents, num_ranks)
            print(
                f"| {num_ranks} | {name} | {pairs / 1e9:.2f}e9 | {1e3 * seconds:.1f} ms | "
                f"{gigabytes:.2f} GB |"
            )


if __name__ == "__main__":
    main()

"""Predicts a training step of 1 to 16384 ranks: `python -m distca.simulate --help`.

The model of time, all of it. Its constants and what they rest on are printed with every table;
tests/test_simulate.py compares it with measured steps.

**Ranks.** GPUs = groups x pipeline stages x tp. The tp GPUs of a tensor parallel group do alike,
so the model counts groups, and "rank" below is one GPU of a group: heads, matrices and activations
are divided by tp (sequence parallelism is assumed). Neighbouring groups share a node.

**Documents.** Packs of max(tokens, context) tokens are cut out of one shuffled stream; a document
ends at the end of its pack. Every system computes these documents, so all do the same work, and
only where that happens differs. A pack longer than `tokens` lies on context / tokens ranks.

**Linear work** of a layer and token, forward: 2 * parameters FLOPs at the matmul speed, and the
bytes of everything elementwise (scenario.py counts them) at the memory's; backward is twice that.
Head and embedding are spread evenly over the layers. Or one measured constant for all of it:
`--fit-step-ms`.

**Attention**: kernel tiles of 128 x 128 that hold a visible pair (as the planner counts them)
times the tile's FLOPs (4 * rows * keys * head_dim * heads forward, 2.5 times that backward) over
the speed of the pass, or the tables of a calibration file.

**Collectives.** A gather or reduce-scatter of B bytes over m ranks, g of them in a node: latency +
max(B * (m - 1) / m / inside, B * (1 - g / m) / (g * between)): a ring through every network card
of a node. An exchange of a plan: latency + max over in and out and over both links of bytes /
bandwidth, ranks not slowing each other. Send and receive are independent.

**Plain packing, context parallelism.** A layer lasts as long as the slowest rank of a context
parallel group: every document is cut into 2 * cp runs of which a rank computes one from the head
and its mirror from the tail. All-gather: keys are gathered before attention, and their gradients
are reduce-scattered; nothing overlaps. Gathered keys are kept for the backward pass (as in
benchmarks/context_parallel.py) or gathered again (the Llama 3 recipe), whichever is faster and
fits. Ring: cp steps, each of them max(1 / cp of the attention, latency + bytes of a neighbour's
keys / bandwidth of the slowest hop); backward moves twice the bytes.

**Variable-length packing** (WLB-LLM): all documents of a step, longest first, go to the pack with
the least predicted work whose tokens stay under what memory allows; per-document context
parallelism inside a pack. The best DP x CP by mean step among those that fit in memory.

**distca.** Tasks come from the planner, torch.ops.distca.plan, which knows these speeds as from a
calibration file. Bytes, forward: a query row brings
q out, out and lse home; a key row k and v. Backward: q, grad_out, lse and delta out, dq home; k
and v out, dk and dv home; without the q, k and v that the server kept. Half of the home tasks run
while inputs travel. Visiting tasks wait for the rank's own transfers and for those of its senders.
Results travel when the server is done, beside the other home tasks. A layer ends when all ranks
have their results. Plans are computed during the step before, so that a step lasts at least as
long as the planner does on the processor that simulates; ranks agree on calls in the first step
only.

**Ping-pong.** A half has half the plan's bytes, and its exchange travels beside the other half's
work. A block ends when both halves do. So one half's exchange has the other's attention and what
precedes it in the block beside it, and the other half's exchange attention and what follows it. It
lasts longer by the share of the pass in which FSDP's collectives use the links. The planner
counts on attention alone (Cluster.hidden_part). Where documents cross ranks, a rank holds two runs
of the pack.

**Parameters.** fsdp: a layer's gather (and in backward its gradients' reduce-scatter, fp32) is
hidden behind that layer's compute, as far as the exchanges beside it leave room; ranks meet in
every micro-batch. Nothing hides the first gathers and last reductions: those of embedding, head and
one layer. zero1: once a step, hidden behind the last backward pass; ranks meet once a step.

**Tensor parallelism**: two all-reduces of the activations a layer and pass, exposed.

**Pipelines.** 1F1B: operations start when their stage is free and their input is there.

**Memory** of a rank: weights, gradients and optimizer (scenario.py), activations of all
micro-batches in flight, the largest workspace that attention needs beside them, and kept inputs.

Left out: launches and Python, stragglers that are not data, contention between jobs and inside
switches, keys that both halves of ping-pong send, fragmentation.
"""

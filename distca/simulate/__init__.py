"""Predicts a training step of 1 to 16384 ranks: `python -m distca.simulate --help`.

The model of time, all of it. Its constants and what they rest on are printed with every table.

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
the speed of the pass, or the tables of a calibration file. Backward also pays `key_block_tiles`
for each task and block of 128 keys (machine.py).

**Collectives.** A gather or reduce-scatter of B bytes over m ranks, g of them in a node: latency +
max(B * (m - 1) / m / inside, B * (1 - g / m) / (g * between)): a ring through every network card
of a node. An exchange of a plan: latency + max over in and out and over both links of bytes /
bandwidth, ranks not slowing each other. Send and receive are independent.

**Plain packing, context parallelism.** A layer lasts as long as the slowest rank of a context
parallel group: every document is cut into 2 * cp runs of which a rank computes one from the head
and its mirror from the tail. All-gather: keys are gathered before attention, again before its
backward pass, and their gradients are reduce-scattered; nothing overlaps (the Llama 3 recipe).
Ring: cp steps, each of them max(1 / cp of the attention, latency + bytes of a neighbour's keys /
bandwidth of the slowest hop); backward moves twice the bytes.

**Variable-length packing** (WLB-LLM): all documents of a step, longest first, go to the pack with
the least predicted work whose tokens stay under what memory allows; per-document context
parallelism inside a pack. The best DP x CP by mean step among those that fit in memory.

**distca.** Tasks come from the planner, torch.ops.distca.plan. Bytes, forward: a query row brings
q out, out and lse home; a key row k and v. Backward: q, grad_out, lse and delta out, dq home; k
and v out, dk and dv home. Home tasks run while inputs travel; visiting tasks wait for the rank's
own transfers and for those of its senders; results travel when the server is done. A layer ends
when all ranks have their results. Ping-pong: each of two halves has half the plan's compute and
bytes; what its two exchanges take is hidden up to the linear work of the other half. Its plan is
the one with the shortest layer of several, made for links up to linear work / attention times as
fast, since that much is hidden. Dedicated servers hold no tokens; with ping-pong a layer lasts
max(linear, attention, a half's round trip).

**Parameters.** fsdp: a layer's gather (and in backward its gradients' reduce-scatter, fp32) is
hidden behind that layer's compute, as far as the exchanges hidden there leave room; ranks meet in
every micro-batch. zero1: once a step, hidden behind the last backward pass; ranks meet once a
step.

**Tensor parallelism**: two all-reduces of the activations a layer and pass, exposed.

**Pipelines.** 1F1B: operations start when their stage is free and their input is there. Same-phase
ticks: all stages run forward or all backward, F_0 .. F_{p-1}, B_0, F_p, B_1, ...; stage s has
micro-batch i - s in F_i and j - (p - 1 - s) in B_j, and one plan balances a tick's attention over
all stages, idle ones too. As many ticks as 1F1B has slots, but up to 2 * (p - s) - 1 micro-batches
in flight instead of p - s.

**Memory** of a rank: weights, gradients and optimizer (scenario.py), activations of all
micro-batches in flight, and the largest workspace that attention needs beside them.

Left out: launches and Python, planning time (it runs ahead), stragglers that are not data,
contention between jobs and inside switches, fragmentation.
"""

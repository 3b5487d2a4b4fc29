"""Predicts a training step of 1 to 16384 ranks: `python -m distca.simulate --help`.

The text below describes the whole model of time. Every table is printed with the constants of the
model and their sources. tests/test_simulate.py compares predictions with measured steps.

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
times the tile's FLOPs (2 * rows * keys * (head_dim + v_head_dim) * heads forward, and backward
2 * rows * keys * (3 * head_dim + 2 * v_head_dim) * heads) over the speed of the pass, or the tables
of a calibration file.

**Collectives.** A gather or reduce-scatter of B bytes over m ranks, g of them in a node: latency +
max(B * (m - 1) / m / inside, B * (1 - g / m) / (g * between)): a ring through every network card
of a node. An exchange of a plan: latency + max over in and out and over both links of bytes /
bandwidth, ranks not slowing each other. Send and receive are independent.

**Plain packing, context parallelism.** A layer lasts as long as the slowest rank of a context
parallel group: every document is cut into 2 * cp runs of which a rank computes one from the head
and its mirror from the tail. All-gather: keys are gathered before attention, and their gradients
are reduce-scattered; nothing overlaps. Gathered keys are kept for the backward pass (as in
benchmarks/context_parallel.py) or gathered again (as in Llama 3's training), whichever is faster
and fits in memory. Ring: cp steps, each of them max(1 / cp of the attention, latency + bytes of a
neighbour's keys / bandwidth of the slowest hop); backward moves twice the bytes.

**Variable-length packing** (WLB-LLM): all documents of a step, longest first, go to the pack with
the least predicted work whose tokens stay under what memory allows; per-document context
parallelism inside a pack. The best DP x CP by mean step among those that fit in memory.

**Sorted by the loader** (verl, slime): the Karmarkar-Karp method divides the documents of a step
into as many packs with like sums of predicted work (attention and linear). Packs of like work meet
in one micro-batch. Nothing limits their tokens, so look at memory. With distca on top, these packs
stay on their ranks, and attention is balanced.

**distca.** Tasks come from the planner, torch.ops.distca.plan, which gets these speeds as if from a
calibration file. Forward, a query row sends q to the server, and out and lse home; a key row sends
k and v to the server. Backward, a query row sends q, grad_out, lse and delta to the server, and dq
home; a key row sends k and v to the server, and dk and dv home. Inputs that the server kept do not
travel again. While inputs travel, as many home tasks run as early_parts
(distca/planning/cluster.py) predicts to be needed, and the others run last. Attention starts later
on ranks with more tokens, which have more linear work. Visiting tasks wait for the rank's own
transfers and for those of its senders. Results travel when the server is done, beside the other
home tasks. If transfers take long enough, rows travel in two or four parts, each with some of the
query heads and the key heads that they read. Visiting tasks of one part run while the next part
arrives and results of the previous part leave. If several parts share keys, these travel with the
first of the parts, and their gradients with the last. A layer ends when all ranks have their
results. Plans are computed during the previous step, so a step takes at least as long as planning
does on the processor that simulates. Ranks agree on calls in the first step only.

**Ping-pong.** The first half of a block is a third of the tokens, and the second half is the rest.
If documents cross ranks, each rank holds two runs of the pack, and the halves are equal. A half has
the same share of the attention and of the plan's bytes as of the tokens. Rows of the first half
travel beside the second half's attention and work before it. Rows of the second half travel beside
the first half's attention and work after it. Rows of a half travel in one part. An exchange is
longer by the share of the pass in which FSDP's collectives use the links. Tensor parallel
collectives of one half are assumed not to delay the other half. As in training, blocks run whole if
the planner predicts that whole blocks are faster.

**Parameters.** fsdp: a layer's gather (in the backward pass also the reduce-scatter of its
gradients, fp32) is hidden behind that layer's compute and its waits for attention, as far as the
exchanges beside them leave room. Ranks wait for each other in every micro-batch. Nothing hides the
first gathers and the last reductions: those of embedding, head and one layer. zero1: once a step,
hidden behind the last backward pass. Ranks wait for each other once a step.

**Tensor parallelism**: two all-reduces of the activations a layer and pass, exposed.

**Pipelines.** Under 1F1B, an operation starts when its stage is free and its input is there. With
all stages as one pool, all ranks run the ticks of distca/planning/ticks.py together. A layer of a
tick lasts as long as it does on the slowest stage, and activations are sent between ticks. Idle
stages compute attention for the others.

**Servers** are `--servers` additional GPUs. They run tasks of the plan, but have no documents and
no model.

**Memory** of a rank: weights, gradients and optimizer (scenario.py), activations of all
micro-batches in flight, the largest workspace that attention needs beside them, and kept inputs.

The model leaves out launches and Python, stragglers whose cause is not data, contention between
jobs and inside switches, keys that both halves of ping-pong send, and fragmentation.
"""

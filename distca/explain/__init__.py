"""A plan in words and numbers: who computes what, why, and what it moves.

    python -m distca.explain --lengths lengths.json --ranks 16 --tokens 65536
    python -m distca.explain --lengths 9000,400,400,200 --ranks 4 --all

Documents are drawn as benchmarks draw them and planned by torch.ops.distca.plan for ranks that need
not exist; then the plan's tasks are accounted for one by one: seconds of one layer, forward and
backward, and bytes. Every option of distca is a flag, except keep_inputs_gb: inputs are never kept
here. Over slow links, a plan that keeps inputs may move more work.

A task moves its query rows from their home ranks to its server and their results back; keys that no
earlier task has brought there come too, and their gradients go back. "x least" are its bytes over
those of the cheapest shape with as many (query, key) pairs; the lower bound of a plan is the sum of
those over receivers, each taking its whole deficit in one task (AttentionShape.least_bytes).
"""

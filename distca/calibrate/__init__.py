"""What attention and links cost on this machine, measured, for the planner and the simulator.

    python -m distca.calibrate --out calibration.json
    torchrun --nproc-per-node 8 ... -m distca.calibrate --out calibration.json

The first measures core attention on one device; the second also the links between its ranks. The
file is `Options.cost_table` (flag --cost-table), read with distca.planning.cost.Calibration.load:

  format             1
  device_type        cuda or cpu; device_name, torch, date (ISO 8601, UTC) say where, with what and
                     when
  heads_q, heads_kv, head_dim, head_dim_v, dtype
                     what was measured; head_dim_v is v's, and may be missing where it is head_dim
  rows, keys         query rows and keys of tasks, increasing; multiples of the kernels' tile
  forward_seconds, backward_seconds
                     [rows][keys]: seconds that one more task of so many query rows, each of which
                     sees all of so many keys of its own, adds to a server that is busy anyway
  seconds_per_task   part of every entry, forward and backward together, that a task costs whatever
                     its size
  links              {"inside": link, "between": link}: ranks of one node, ranks of different nodes;
                     a link is {"latency_s", "bytes_per_second"}, measured with rows as when a group
                     opens (distca/ranks/links.py); null where there is none

How attention is measured: the device computes as many equal tasks at once as fill it, through
torch.ops.distca.attend and attend_backward; the time is divided by their number. Each task is the
last queries of a document of its own, under a window without limits. No document has more rows
than keys; such entries, which only interpolation reads, lie on a line through measured ones. Times
are medians of warm calls on random numbers, on CUDA between events, else by the clock.
"""

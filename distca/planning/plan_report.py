"""What a plan reports: its balance, its cost, and the measurements that it used."""

from dataclasses import dataclass, field

from distca.watching.figures import LINKS, max_over_mean, without


@dataclass(frozen=True)
class PlanReport:
    """Balance and cost of a plan, predicted for one layer, forward and backward."""

    seconds_before: list[float]
    """Attention time of each rank without balancing, in seconds."""
    seconds_after: list[float]
    """Attention time of each rank under the plan, in seconds."""
    bytes_out: list[int]
    """Bytes that each rank sends."""
    bytes_in: list[int]
    """Bytes that each rank receives."""
    plan_ms: float
    """Time for the exchange of pieces, the plan, this rank's layout and the comparison of plans, in
    milliseconds."""
    waited_ms: float
    """Milliseconds that the training thread waited for the plan. They include the time before the
    planner began, so they can exceed plan_ms."""
    attention_ms: list[float] = field(default_factory=list)
    """Measured attention time of each rank in an earlier step: all layers, forward and backward,
    including waits for rows. Empty if nothing was measured (Watching.log_every)."""
    exposed_ms: list[float] = field(default_factory=list)
    """Measured part of attention_ms in which the rank computed nothing, because rows of other ranks
    were on their way or not sent yet."""
    link_gb_per_s: float | None = None
    """Bandwidth that the plan expects from a rank to the ranks of its node, in GB/s. It comes from
    Options.link_gb_per_s, from the cost_table, or from the measurement when the group opened. None:
    each node has one rank."""
    node_link_gb_per_s: float | None = None
    """Like link_gb_per_s, from a rank to the ranks of other nodes. None: all ranks share a node."""
    transfer_waits_ms: list[float] = field(default_factory=list)
    """Milliseconds that transfers of a layer wait for other traffic, such as FSDP's, in the forward
    pass and in the backward pass. Measured in earlier steps; 0 until some rows have travelled."""
    link_room_ms: list[float] = field(default_factory=list)
    """Milliseconds of a layer's linear work minus those of FSDP's traffic on the links, in the
    forward pass and in the backward pass. Negative if the traffic takes longer. Transfers that take
    longer than attention plus this time would delay FSDP. Predicted; empty until a model with FSDP2
    has run."""
    hidden_ms: float = 0.0
    """Milliseconds of a layer's linear work before attention, forward and backward. Under
    ping-pong, this work hides transfers. Measured in earlier steps; 0 before any measurement, and
    without ping-pong."""
    pays_in_halves: bool = True
    """Whether blocks in ping-pong run in halves. False if the planner predicts that they are
    faster whole, and in early plans until lags of ranks are known."""
    measured_speeds: list[float] = field(default_factory=list)
    """Attention speed of each rank relative to the fastest rank, as measured in earlier steps. It
    scales Options.server_speeds. Empty if all ranks are equally fast."""
    lags_ms: list[float] = field(default_factory=list)
    """Milliseconds by which a layer's work outside of attention, forward and backward, takes longer
    on each rank than on the fastest. Ranks that lag get less attention. Predicted for the rank's
    tokens from measurements in earlier steps. Empty before any measurement, and if ranks are
    alike."""
    kept_bytes: list[int] = field(default_factory=list)
    """Bytes of inputs that each rank keeps in a layer from the forward to the backward pass."""
    keeping: str = ""
    """What limits kept inputs, or why there are none. Empty if nothing may be kept."""
    servers: list[int] = field(default_factory=list)
    """Ranks that run no model, and so hold no tokens. imbalance_before leaves them out."""
    idle: list[int] = field(default_factory=list)
    """Ranks of speed 0, which compute no attention. imbalance_after leaves them out."""

    @property
    def imbalance_before(self) -> float:
        """max / mean of seconds_before plus lags, of the ranks that train. 1 is perfect balance."""
        return max_over_mean(without(self.servers, self._with_lags(self.seconds_before)))

    @property
    def imbalance_after(self) -> float:
        """max / mean of seconds_after plus lags, of the ranks that compute attention."""
        return max_over_mean(without(self.idle, self._with_lags(self.seconds_after)))

    def _with_lags(self, seconds: list[float]) -> list[float]:
        lags_ms = self.lags_ms or [0.0] * len(seconds)
        return [each + 1e-3 * lag for each, lag in zip(seconds, lags_ms, strict=True)]

    def figures(self) -> dict[str, float]:
        """Return the figures that logs show. moved_mb: what all ranks send for one layer, forward
        and backward, in 1e6 bytes. kept_mb: the inputs that all ranks keep of it, in 1e6 bytes.
        Bandwidths of links that do not exist are left out."""
        return {
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "moved_mb": sum(self.bytes_out) / 1e6,
            "kept_mb": sum(self.kept_bytes) / 1e6,
            "plan_ms": self.plan_ms,
            "waited_ms": self.waited_ms,
            **{name: vars(self)[name] for name in LINKS if vars(self)[name] is not None},
        }

    def record(self) -> dict:
        """Return figures and lists by rank, as in steps.jsonl."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return {**self.figures(), "keeping": self.keeping, **lists}

"""distca: balanced core attention for packed documents."""

from distca import (
    _fake,  # noqa: F401
    _library,  # noqa: F401  registers the operators before anything uses them
    _signals,  # noqa: F401
)
from distca.attention import (
    core_attention,
    documents,
    scaled_dot_product_attention,
    varlen_attention,
)
from distca.batches import ShardedBatch, shard_batch
from distca.cost import AttentionShape
from distca.documents import Documents
from distca.join import join
from distca.options import Options
from distca.pingpong import PingPong
from distca.planning import Plan, PlanReport, plan
from distca.session import close, configure, init

__all__ = [
    "AttentionShape",
    "Documents",
    "Options",
    "PingPong",
    "Plan",
    "PlanReport",
    "ShardedBatch",
    "close",
    "configure",
    "core_attention",
    "documents",
    "init",
    "join",
    "plan",
    "scaled_dot_product_attention",
    "shard_batch",
    "varlen_attention",
]
__version__ = "0.1.0"

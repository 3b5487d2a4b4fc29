"""distca: balanced core attention for packed documents."""

from distca import _library  # noqa: F401  registers the operators before anything uses them
from distca.attention import core_attention, max_logits
from distca.options import Options
from distca.pingpong.pingpong import PingPong
from distca.planning.batches import ShardedBatch, shard_batch
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import Plan
from distca.planning.plan_report import PlanReport
from distca.planning.serving import serve
from distca.planning.step import plan
from distca.ranks.join import join
from distca.ranks.session import close, configure, init
from distca.scope import documents, scaled_dot_product_attention, varlen_attention
from distca.watching.settings import Watching

__all__ = [
    "AttentionShape",
    "Documents",
    "Options",
    "PingPong",
    "Plan",
    "PlanReport",
    "ShardedBatch",
    "Watching",
    "close",
    "configure",
    "core_attention",
    "documents",
    "init",
    "join",
    "max_logits",
    "plan",
    "scaled_dot_product_attention",
    "serve",
    "shard_batch",
    "varlen_attention",
]
__version__ = "0.1.0"

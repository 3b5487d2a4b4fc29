"""Blocks that run on two halves of their tokens."""

from distca.pingpong.pingpong import PingPong, middle, nearest_border

__all__ = ["PingPong", "middle", "nearest_border"]

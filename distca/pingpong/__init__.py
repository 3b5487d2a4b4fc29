"""Blocks that run on two halves of their tokens."""

from distca.pingpong.pingpong import PingPong, nearest_border, third

__all__ = ["PingPong", "nearest_border", "third"]

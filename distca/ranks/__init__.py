"""Ranks that share attention: groups, sessions, and how a rank joins, is heard and leaves."""

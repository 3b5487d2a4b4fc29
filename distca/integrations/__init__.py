"""Frameworks that train with distca. Nothing is imported here: each file imports its framework."""

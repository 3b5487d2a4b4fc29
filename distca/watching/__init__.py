"""Records, lines, scalars, pictures and traces of what was balanced."""

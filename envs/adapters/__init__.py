"""Environments spoken to by others, and others as environments; each needs its extra."""

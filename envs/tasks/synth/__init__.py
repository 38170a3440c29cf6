"""The task factory: a real project in, bug-fixing tasks out. See `factory`."""

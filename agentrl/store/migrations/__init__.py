"""Schema steps, run by `Store.open` through Alembic. Never by hand."""

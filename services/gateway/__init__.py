"""The environment gateway: sessions for many callers over HTTP, and what happened to each, provable later."""

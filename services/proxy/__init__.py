"""The recording model proxy as a process: `harness.proxy` behind HTTP, one base URL per session."""

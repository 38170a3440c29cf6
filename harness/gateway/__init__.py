"""A gateway's sessions from afar: the records on its wire, a client, and sessions for the harness."""

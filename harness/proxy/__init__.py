"""The recording model proxy without its HTTP server: requests of any client to exact recorded calls.

Read `exchange` (what a request and an answer are), `lines` (how a request finds what was recorded before it),
`model` (asking), the four wire formats, `door` (one session's endpoints).
"""

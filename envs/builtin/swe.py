"""`swe`: small repositories with one wrong line and tests: the generated suite `swe_mini`, registered."""

from __future__ import annotations

from envs.builtin.packages import PackagedEnvironment
from envs.tasks import swe_mini

ENVIRONMENT = PackagedEnvironment(
    name="swe",
    summary="Repair a small repository until its tests pass, in a sandbox.",
    generate=swe_mini.generate,
)

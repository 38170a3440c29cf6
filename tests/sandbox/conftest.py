"""The conformance suite is the product's; here its assertions are explained by pytest."""

import pytest

pytest.register_assert_rewrite("envs.sandbox.conformance")

"""Graders as plug-ins: a task names some, and its reward is the weighted sum of what they say."""

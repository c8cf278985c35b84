"""Running programs that nobody trusts: a policy's answers, and scorers that evaluate what a policy wrote.

docs/sandbox.md says what is promised and how. Leaves out what is done with the outcome (environments.code).
"""

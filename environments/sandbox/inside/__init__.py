"""What runs inside a box, below the program that nobody trusts: with the standard library alone.

Modules here are loaded by another interpreter than the node's, of another release perhaps.
"""

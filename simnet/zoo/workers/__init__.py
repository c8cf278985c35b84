"""What cheats compute: each changes one step of the honest worker (node.inference.compute) and leaves all others."""

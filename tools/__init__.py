"""What keeps the documentation true: pages that are made from the code. Not part of the installed program."""

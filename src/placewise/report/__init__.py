"""What a person wants to see of a plan: why it is not faster (`explain`), tables of it, and its trace."""

"""Who may call, and what each tenant may have: the access file, the keys in it, and what is written down of calls."""

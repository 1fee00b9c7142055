"""Files that a finished clip leaves behind, written as the clip goes and shown only when they are complete."""

"""`h3stream doctor`: looks at a machine as the server will find it, and says how to mend what is wrong."""

"""SSH to the user's notebooks and jobs with OpenSSH's own client, through the hub."""

"""The firewall of every node: its rules, and the script that keeps them in place."""

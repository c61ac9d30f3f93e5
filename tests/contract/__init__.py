"""What two distributions, installed on different machines, expect of each other."""

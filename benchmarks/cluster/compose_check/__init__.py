"""Tries docker-compose.yml with real containers; `scripts/compose_check.sh` prepares the machine and calls it."""

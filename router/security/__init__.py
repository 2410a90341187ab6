"""Decides who may call a router and how often, and keeps tenants apart."""

"""This library in other frameworks, one module each. Importing one imports no framework; see docs/integrations.md."""

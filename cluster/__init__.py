"""The command line, the configuration schema, and everything that runs a whole job."""

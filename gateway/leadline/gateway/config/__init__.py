"""The gateway's settings.

settings    GatewayConfig: every setting with its default and its limits
documents   YAML and JSON files, with errors that begin with the setting's path
file        the settings file, overridden by the command line, and watched for changes
options     the options of `leadline gateway`

Import the modules, not this package.
"""

"""The version of tutti."""

VERSION = "0.1.0"

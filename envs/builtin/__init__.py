"""Built-in environments, a file each; `envs.registry.BUILTIN` names them."""

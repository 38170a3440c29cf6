"""Task formats of the field to Harbor packages and back, a file each; `table.FORMATS` names them."""

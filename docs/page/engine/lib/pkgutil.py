def extend_path(path, name):
    return path

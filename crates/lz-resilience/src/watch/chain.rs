//! The way from a path to a file: every name that is looked up in a directory, and may come to mean another.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Most links followed for one path; the kernel gives up at 40 as well.
const MOST_LINKS: usize = 40;

/// Names in directories whose meaning decides what the paths lead to.
pub(super) type Links = BTreeSet<(PathBuf, OsString)>;

/// The links on the way to each of the (absolute) files, the files themselves, and where one is missing the first
/// name that is.
pub(super) fn links(files: &[PathBuf]) -> Links {
    let mut links = Links::new();
    for file in files {
        follow(file, &mut links);
    }
    links
}

fn follow(file: &Path, links: &mut Links) {
    let mut here = PathBuf::from("/");
    let mut rest = reversed(file);
    let mut followed = 0;
    while let Some(name) = rest.pop() {
        if name == ".." {
            // `here` holds no links, so its parent is what `..` means.
            here.pop();
            continue;
        }
        let there = here.join(&name);
        let Ok(found) = std::fs::symlink_metadata(&there) else {
            links.insert((here, name));
            return;
        };
        if found.is_symlink() {
            links.insert((here.clone(), name));
            followed += 1;
            let Ok(target) = std::fs::read_link(&there) else { return };
            if followed > MOST_LINKS {
                return;
            }
            if target.is_absolute() {
                here = PathBuf::from("/");
            }
            rest.extend(reversed(&target));
        } else if rest.is_empty() {
            links.insert((here, name));
            return;
        } else {
            here = there;
        }
    }
}

/// The names of a path, the first one last.
fn reversed(path: &Path) -> Vec<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    let mut names: Vec<OsString> = path.components().filter_map(name).collect();
    names.reverse();
    names
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(root: &Path, file: &Path) -> Vec<String> {
        let strip = |(dir, name): &(PathBuf, OsString)| {
            let full = dir.join(name);
            full.strip_prefix(root).ok().map(|path| path.display().to_string())
        };
        links(&[file.to_owned()]).iter().filter_map(strip).collect()
    }

    #[test]
    fn every_link_on_the_way_is_found() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("mount/..v1")).unwrap();
        std::fs::write(root.join("mount/..v1/app.yaml"), "a").unwrap();
        symlink("..v1", root.join("mount/..data")).unwrap();
        symlink("..data/app.yaml", root.join("mount/app.yaml")).unwrap();
        symlink(root.join("mount"), root.join("etc")).unwrap();
        let found = names(&root, &root.join("etc/app.yaml"));
        assert_eq!(found, ["etc", "mount/..data", "mount/app.yaml", "mount/..v1/app.yaml"]);
        assert_eq!(names(&root, &root.join("etc/../mount/..v1/app.yaml")), ["etc", "mount/..v1/app.yaml"]);
    }

    #[test]
    fn where_something_is_missing_the_first_missing_name_counts() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        assert_eq!(names(&root, &root.join("no/such/file")), ["no"]);
        symlink("gone/file", root.join("link")).unwrap();
        assert_eq!(names(&root, &root.join("link")), ["gone", "link"]);
    }

    #[test]
    fn loops_end() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        symlink("b", root.join("a")).unwrap();
        symlink("a", root.join("b")).unwrap();
        symlink("grow/x/x/x", root.join("grow")).unwrap();
        assert_eq!(names(&root, &root.join("a")), ["a", "b"]);
        assert_eq!(names(&root, &root.join("grow")), ["grow"]);
    }
}

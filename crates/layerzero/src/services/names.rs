//! The names of the kernels that come with LayerZero.

use std::sync::{Arc, LazyLock};

use lz_model::KernelDescriptor;
use lz_select::KernelName;

/// The kernels that come with LayerZero, loaded or not. Written by `make schemas` out of their capabilities documents.
pub(crate) static SHIPPED: LazyLock<Arc<Vec<KernelName>>> =
    LazyLock::new(|| Arc::new(serde_json::from_str(include_str!("../../data/names.json")).expect("a test reads it")));

/// Kernels of torch's that only nodes of compiled models run. Selection does not choose between them; a policy may name them.
const GRAPH_KERNELS: [&str; 5] = ["torch.mm", "torch.addmm", "torch.bmm", "torch.baddbmm", "torch.convolution"];

/// Every name a policy may use for a kernel that is not registered.
pub(crate) static NAMES: LazyLock<Arc<Vec<KernelName>>> = LazyLock::new(|| {
    let of_graphs = GRAPH_KERNELS.map(|name| KernelName::from(&KernelDescriptor::new(name, "", "torch")));
    Arc::new(SHIPPED.iter().cloned().chain(of_graphs).collect())
});

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::Path;

    #[test]
    fn the_list_of_names_is_what_the_documents_say() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/layerzero/backends");
        let mut named = BTreeMap::new();
        let contrib = std::fs::read_dir(folder.join("contrib")).unwrap();
        for entry in std::fs::read_dir(folder).unwrap().chain(contrib) {
            let Ok(text) = std::fs::read_to_string(entry.unwrap().path().join("capabilities.json")) else { continue };
            for kernel in lz_model::capabilities::read(&text).unwrap().kernels {
                named.insert(kernel.id.clone(), KernelName::from(&kernel));
            }
        }
        let named: Vec<KernelName> = named.into_values().collect();
        assert!(named.len() > 100 && **SHIPPED == named, "run 'make schemas'");
    }
}

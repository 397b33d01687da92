//! GPU generations: which SM versions belong to which, as data.

use serde::{Deserialize, Serialize};

/// A row of the generation table: SM versions in `sm.0 .. sm.1` (upper end exclusive).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerationRow {
    /// Generation name, lower case: `hopper`.
    pub generation: String,
    /// First SM version of the generation and the first one after it.
    pub sm: (u32, u32),
    /// Tensor-core generation.
    pub tensor_cores: u32,
    /// Matrix and copy instructions kernels can be written against.
    #[serde(default)]
    pub instruction_sets: Vec<String>,
}

/// The mapping from SM version to generation. The built-in one covers SM 7.0 to Blackwell;
/// a capabilities document may bring its own rows, which are consulted first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationTable(Vec<GenerationRow>);

impl GenerationTable {
    /// The table shipped with this crate (`data/gpu_generations.json`).
    pub fn builtin() -> GenerationTable {
        let rows = include_str!("../data/gpu_generations.json");
        GenerationTable(serde_json::from_str(rows).expect("the shipped table parses; a test loads it"))
    }

    /// This table with `rows` taking precedence over its own.
    pub fn overlaid(mut self, rows: impl IntoIterator<Item = GenerationRow>) -> GenerationTable {
        self.0.splice(0..0, rows);
        self
    }

    /// The row an SM version belongs to.
    pub fn row(&self, sm: u32) -> Option<&GenerationRow> {
        self.0.iter().find(|row| (row.sm.0..row.sm.1).contains(&sm))
    }

    /// Every generation name, once, oldest first.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for row in &self.0 {
            if !names.contains(&row.generation.as_str()) {
                names.push(&row.generation);
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specifications_ranges_map_to_their_generation() {
        let table = GenerationTable::builtin();
        let expected = [
            (75, "turing", 2),
            (80, "ampere", 3),
            (86, "ampere", 3),
            (89, "ada", 3),
            (90, "hopper", 4),
            (100, "blackwell", 5),
            (120, "blackwell", 5),
        ];
        for (sm, generation, tensor_cores) in expected {
            let row = table.row(sm).unwrap();
            assert_eq!((row.generation.as_str(), row.tensor_cores), (generation, tensor_cores), "SM {sm}");
        }
        assert_eq!(table.row(52), None);
    }

    #[test]
    fn own_rows_come_first() {
        let row =
            GenerationRow { generation: "rubin".into(), sm: (130, 140), tensor_cores: 6, instruction_sets: vec![] };
        let table = GenerationTable::builtin().overlaid([row]);
        assert_eq!(table.row(130).unwrap().generation, "rubin");
        assert_eq!(table.row(120).unwrap().generation, "blackwell");
    }
}

//! Prints this machine as JSON, and its notes as people read them.
//!
//! `cargo run -p lz-hardware --example detect`

use lz_model::Platform;

fn main() -> Result<(), serde_json::Error> {
    let machine = lz_hardware::detect();
    println!("{}", serde_json::to_string_pretty(&machine)?);
    for note in &machine.notes {
        eprintln!("note: {note}");
    }
    for device in &machine.devices {
        let memory = match (device.platform, &device.uuid) {
            (Platform::Cpu, _) => lz_hardware::cpu_memory(),
            (_, Some(uuid)) => lz_hardware::cuda_memory(uuid),
            (_, None) => None,
        };
        eprintln!("memory: {}: {memory:?}", device.name);
    }
    Ok(())
}
